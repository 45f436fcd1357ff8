"""From a solution to plans on named workers."""
