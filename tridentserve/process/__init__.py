"""The use that a process makes of its memory: objects that live long, and what torch has freed. Needs no torch."""
