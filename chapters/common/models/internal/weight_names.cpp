#include "chapters/common/models/internal/weight_names.h"

#include <algorithm>
#include <regex>

namespace shardbook {

std::string without_wrappers(const std::string& name) {
  std::string plain;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string part = name.substr(begin, end - begin);
    if (part != "module" && part != "_orig_mod" &&
        part != "_fsdp_wrapped_module" &&
        part != "_checkpoint_wrapped_module") {
      plain += (plain.empty() ? "" : ".") + part;
    }
    begin = end + 1;
  }
  return plain;
}

std::string resnet_name_in_transformers(const std::string& name) {
  const auto kind = [](const std::string& layer) {
    return layer == "conv" || layer == "0" ? "convolution." : "normalization.";
  };
  static const std::regex kStem("(conv|bn)1\\.(\\w+)"), kHead("fc\\.(\\w+)"),
      kBlock(
          "layer(\\d)\\.(\\d+)\\."
          "(?:(conv|bn)(\\d)|downsample\\.([01]))\\.(\\w+)");
  std::smatch at;
  if (std::regex_match(name, at, kHead)) return "classifier.1." + at.str(1);
  if (std::regex_match(name, at, kStem)) {
    return "resnet.embedder.embedder." + (kind(at.str(1)) + at.str(2));
  }
  if (!std::regex_match(name, at, kBlock)) return "";
  // transformers counts stages from 0, torchvision from 1
  const auto index = [&](int i) {
    return std::to_string(std::stoi(at.str(i)) - 1);
  };
  const std::string block =
      "resnet.encoder.stages." + index(1) + ".layers." + at.str(2) + ".";
  if (at[5].matched) return block + "shortcut." + kind(at.str(5)) + at.str(6);
  return block + "layer." + index(4) + "." + kind(at.str(3)) + at.str(6);
}

}  // namespace shardbook
