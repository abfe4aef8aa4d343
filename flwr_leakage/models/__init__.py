"""Networks of the field's papers."""
