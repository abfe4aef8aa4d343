"""What is done with an observation: grant, attack, evaluate, record. No Flower here."""
