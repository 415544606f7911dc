"""What every dialect of the API shares: preparing a request, running it, and the text models that both need."""
