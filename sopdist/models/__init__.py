"""Models: the paper's backbones for small images; everything else comes from timm."""
