"""Whether a run was right: a reference on one device, compared, and the certificate of it."""
