"""The lessons: notebooks executed with papermill, their parameters, copies, exercises, tables and pictures."""
