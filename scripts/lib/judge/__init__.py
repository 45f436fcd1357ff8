"""The judge of the default models: reads a picture or a clip back and compares it with what was asked for."""
