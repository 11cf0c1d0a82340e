"""Records of steps, and where they go: metrics file, console, trackers; alarms and the watchdog."""
