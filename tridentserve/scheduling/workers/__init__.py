"""The workers as the scheduler keeps books of them, and those of them that it offers to a policy."""
