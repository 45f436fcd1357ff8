"""The parts of the scripts: one directory per group of scripts, and the modules that all of them share."""
