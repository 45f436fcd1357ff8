"""Messages between the processes of one service, without a call of Ray for each."""
