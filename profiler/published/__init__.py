"""The published configurations of models."""
