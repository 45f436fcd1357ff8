"""End-to-end tests of the start of a service."""
