"""What an attacker expects of an image."""
