#pragma once

namespace shardbook {

/// `kCpu`: real memory of the host. `kMeta`: shapes without values. `kCuda`: a
/// real GPU.
enum class DeviceType { kCpu, kMeta, kCuda };

}  // namespace shardbook
