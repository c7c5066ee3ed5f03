"""What recurrent denoisers are made of: the selective scan, the short convolution, mixers and blocks."""
