"""What is shown of an image: crops, the strong view, and the random numbers behind both."""
