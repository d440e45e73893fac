#pragma once

// The names of weights in the files of other programs.

#include <string>

namespace shardbook {

/// `name` as it was before PyTorch wrapped the model: without the "module." of
/// DistributedDataParallel, the "_orig_mod." of torch.compile and the names of
/// FSDP's and of recomputation's wrappers, at any place in the name.
std::string without_wrappers(const std::string& name);

/// The name of torchvision's tensor `name` in transformers'
/// ResNetForImageClassification; empty where it has none.
///
///   conv1.weight                resnet.embedder.embedder.convolution.weight
///   layer2.0.bn1.bias           resnet.encoder.stages.1.layers.0.layer.0
///                                   .normalization.bias
///   layer2.0.downsample.0.weight    ... .layers.0.shortcut.convolution.weight
///   fc.weight                   classifier.1.weight
std::string resnet_name_in_transformers(const std::string& name);

}  // namespace shardbook
