"""The default text-to-video model: moving shapes, from their captions to a model folder."""
