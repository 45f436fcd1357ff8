"""The console: the page at `/`, and the live state of the cluster that it shows."""
