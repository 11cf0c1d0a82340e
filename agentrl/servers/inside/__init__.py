"""What runs inside of another program's process: nothing here may import the rest of this project."""
