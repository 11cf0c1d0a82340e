"""Workers: a class whose methods say how they are spread over ranks, and a group of such ranks that reads as one object."""
