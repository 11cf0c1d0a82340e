"""What watches a run: alarms, the watchdog, attempts that fail, roles that never speak."""
