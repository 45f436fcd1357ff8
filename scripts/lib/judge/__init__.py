"""The judge of the default model: reads a picture back and compares it with what was asked for."""
