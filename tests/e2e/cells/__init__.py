"""End-to-end tests of a service with several cells."""
