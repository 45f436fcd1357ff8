"""The configuration of a service: one module per section, read from YAML and checked."""
