"""The parts that the bodies of all requests share: their fields, how they are read, and what a request is made of."""
