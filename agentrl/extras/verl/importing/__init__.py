"""Translation of verl configs and run scripts into configs of this project."""
