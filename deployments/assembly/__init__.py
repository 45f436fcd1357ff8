"""Puts a scheduler together for the service, the simulator and the replay of decision logs."""
