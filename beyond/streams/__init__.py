"""A stream in real life: reads ahead, never ends, resumes, comes from cameras, is shown and spoken."""
