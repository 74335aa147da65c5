"""What can only be decided where forward and backward meet: what is kept between them, and one budget for both."""
