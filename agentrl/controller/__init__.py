"""The training loop; read train.py first."""
