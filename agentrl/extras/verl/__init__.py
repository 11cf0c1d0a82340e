"""Everything that reads what was written for verl: configs, keys, tools, interactions."""
