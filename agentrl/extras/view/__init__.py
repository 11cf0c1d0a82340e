"""`agentrl view`: a local web page of runs, evaluations and files of trajectories; it reads only."""
