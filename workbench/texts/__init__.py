"""The text: reading files of many kinds, and cutting them into token blocks."""
