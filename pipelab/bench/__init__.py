"""What `pipelab bench` measures: whole calls, medians of several, in turn within one run; one file a report."""
