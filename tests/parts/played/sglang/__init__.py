"""What `python -m sglang.launch_server` finds in place of SGLang, when this folder is in PYTHONPATH."""
