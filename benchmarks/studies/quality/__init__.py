"""Quality of cache policies by what they keep, in tasks that tell policies apart."""
