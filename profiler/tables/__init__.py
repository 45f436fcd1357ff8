"""Profile tables: their rows, their CSV form, and curves through them."""
