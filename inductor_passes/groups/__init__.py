"""What is known about process groups before anything is compiled."""
