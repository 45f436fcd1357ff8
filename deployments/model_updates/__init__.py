"""Models that are added, drained and removed while the service runs."""
