"""What a checkpoint is good for elsewhere: the network for timm, for `sopdist.models` and as ONNX, the noise table as
Parquet. Knows tensors and their meaning; where they come from is the commands' business."""
