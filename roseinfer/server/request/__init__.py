"""The life of one inference request, whatever API it came by."""
