"""Risk scores: how well a perfect attacker would do, without an attack."""
