"""What `python -m graphar` does besides tuning and the doctor's rounds."""
