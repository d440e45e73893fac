#include "core/internal/cuda_device.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/context.h"

namespace shardbook::internal {

namespace {

std::uint64_t bit_of(int stream) { return std::uint64_t{1} << stream; }

}  // namespace

void BlockUse::begin(int number) {
  SB_CHECK(number >= 0 && number < kMaxStreams, "stream ", number,
           ": a CUDA device has streams 0 to ", kMaxStreams - 1);
  if (GraphBlocks* graph = device_.recording_.load(std::memory_order_relaxed)) {
    device_.adopt(*this, *graph);
  }
  const std::uint64_t known = streams_.load(std::memory_order_acquire);
  if ((known & bit_of(number)) == 0) device_.begin(*this, number);
}

// --- Streams -----------------------------------------------------------------

CudaDevice::~CudaDevice() {
  // A device that has failed reports it where the host synchronized.
  try {
    synchronize();
    for (void* event : events_) runtime_.destroy_event(event);
    for (auto& stream : streams_) {
      if (stream.load() != nullptr) runtime_.destroy_stream(stream.load());
    }
  } catch (const Error&) {
  }
}

void* CudaDevice::stream(int number) {
  SB_CHECK(number >= 0 && number < kMaxStreams, "stream ", number,
           ": a CUDA device has streams 0 to ", kMaxStreams - 1);
  const GraphBlocks* graph = recording_.load(std::memory_order_relaxed);
  SB_CHECK(
      graph == nullptr || number == graph->stream(), "work for stream ", number,
      " while a graph is recorded: a graph has the work of one stream, here ",
      graph->stream());
  runtime_.use(index_);
  auto& stream = streams_[static_cast<std::size_t>(number)];
  if (void* made = stream.load(std::memory_order_acquire)) return made;
  const std::lock_guard<std::mutex> lock(making_streams_);
  if (stream.load() == nullptr) {
    stream.store(runtime_.make_stream(), std::memory_order_release);
    num_streams_ += 1;
  }
  return stream.load();
}

void CudaDevice::synchronize(int number) {
  refuse_recording("the host waits for a stream");
  runtime_.synchronize_stream(stream(number));
}

void CudaDevice::synchronize() {
  refuse_recording("the host waits for the device");
  runtime_.use(index_);
  for (auto& stream : streams_) {
    if (void* made = stream.load(std::memory_order_acquire)) {
      runtime_.synchronize_stream(made);
    }
  }
}

void CudaDevice::hold(int number, CudaDevice& other, int other_number) {
  void* event = nullptr;
  {
    const std::lock_guard<std::mutex> lock(other.uses_);
    event = other.record(other_number);
  }
  runtime_.hold_stream(stream(number), event);
  const std::lock_guard<std::mutex> lock(other.uses_);
  other.events_.push_back(event);
}

// --- Graphs ------------------------------------------------------------------

void CudaDevice::begin_recording(GraphBlocks& blocks) {
  runtime_.begin_capture(stream(blocks.stream()));
  recording_ = &blocks;
}

void* CudaDevice::end_recording() {
  void* const recorded = stream(recording_.exchange(nullptr)->stream());
  return runtime_.end_capture(recorded);
}

void CudaDevice::drop_recording() noexcept {
  const GraphBlocks* const blocks = recording_.exchange(nullptr);
  if (blocks == nullptr) return;
  const auto number = static_cast<std::size_t>(blocks->stream());
  runtime_.drop_capture(streams_[number].load());
}

void CudaDevice::refuse_recording(const char* why) const {
  SB_CHECK(recording_ == nullptr, "a graph cannot record this: ", why);
}

void refuse_recording(const Device& device, const char* op, const char* why) {
  if (!device.is_cuda() || !cuda_device(device).is_recording()) return;
  SB_FAIL(op, ": a graph cannot record this: ", why);
}

void CudaDevice::adopt(BlockUse& use, GraphBlocks& graph) {
  const std::lock_guard<std::mutex> lock(uses_);
  auto& graphs = use.graphs_;
  if (std::count(graphs.begin(), graphs.end(), &graph) > 0) return;
  graphs.push_back(&graph);
  graph.uses_.push_back(&use);
}

GraphBlocks::~GraphBlocks() {
  CudaDevice& gpu = cuda_device(device_);
  const std::lock_guard<std::mutex> lock(gpu.uses_);
  for (BlockUse* use : uses_) {
    auto& graphs = use->graphs_;
    graphs.erase(std::find(graphs.begin(), graphs.end(), this));
    use->earlier_.push_back({stream_, nullptr});
  }
}

// --- Blocks ------------------------------------------------------------------

// An event of this device, recorded now. A wait is for the point that was
// recorded when the wait was issued, so an event may be recorded again at once.
void* CudaDevice::record(int number) {
  void* const recorded_on = stream(number);
  if (events_.empty()) events_.push_back(runtime_.make_event());
  runtime_.record_event(events_.back(), recorded_on);
  void* event = events_.back();
  events_.pop_back();
  return event;
}

void CudaDevice::forget_earlier(BlockUse& use) {
  for (const BlockUse::Earlier& earlier : use.earlier_) {
    if (earlier.event != nullptr) events_.push_back(earlier.event);
  }
  use.earlier_.clear();
}

void CudaDevice::begin(BlockUse& use, int number) {
  void* const user = stream(number);
  const std::lock_guard<std::mutex> lock(uses_);
  for (BlockUse::Earlier& earlier : use.earlier_) {
    if (earlier.stream == number) continue;
    if (earlier.event == nullptr) earlier.event = record(earlier.stream);
    runtime_.hold_stream(user, earlier.event);
  }
  use.streams_.fetch_or(bit_of(number), std::memory_order_release);
}

// Called from destructors. An event that cannot be recorded now is recorded
// when a stream waits for it, which is later but also correct.
void CudaDevice::end(BlockUse& use) {
  const std::lock_guard<std::mutex> lock(uses_);
  const std::uint64_t streams = use.streams_.exchange(0);
  if (streams == 0) return;
  forget_earlier(use);
  for (int number = 0; number < kMaxStreams; ++number) {
    if ((streams & bit_of(number)) == 0) continue;
    void* event = nullptr;
    try {
      // An event recorded into a graph cannot be waited for afterwards.
      if (num_streams_ > 1 && recording_ == nullptr) event = record(number);
    } catch (const Error&) {
    }
    use.earlier_.push_back({number, event});
  }
}

/// Blocks of one rank on its GPU.
class CudaMemory : public DeviceMemory {
 public:
  explicit CudaMemory(CudaDevice& device) : device_(device) {}
  ~CudaMemory() override {
    try {
      release_kept();
    } catch (const Error&) {
    }
  }

  // First a block that only the current stream has used: no stream waits.
  // Otherwise the block freed first: its users finish soonest. A graph cannot
  // wait for earlier work, so a recording accepts only the first kind, even
  // from the graph's own blocks.
  Block take_kept(std::size_t bytes) override {
    const auto found = kept_.find(bytes);
    if (found == kept_.end()) return {};
    std::vector<Block>& blocks = found->second;
    auto best = blocks.end();
    const GraphBlocks* const recording = device_.recording_;
    const std::lock_guard<std::mutex> lock(device_.uses_);
    const int stream = RankContext::current().stream;
    for (auto block = blocks.end(); block != blocks.begin();) {
      --block;
      const auto& owners = block->use->graphs_;
      if (std::any_of(owners.begin(), owners.end(),
                      [=](const auto* owner) { return owner != recording; })) {
        continue;
      }
      const bool alone = is_alone(*block->use, stream);
      if (alone || recording == nullptr) best = block;
      if (alone) break;
    }
    if (best == blocks.end()) return {};
    const Block block = *best;
    blocks.erase(best);
    return block;
  }
  Block take_new(std::size_t bytes) override {
    device_.runtime().use(device_.index());
    void* data = device_.runtime().allocate(bytes);
    if (data == nullptr) return {};
    auto& use = uses_[data];
    use = std::make_unique<BlockUse>(device_);
    return {data, use.get()};
  }
  void keep(const Block& block, std::size_t bytes) override {
    device_.end(*block.use);
    kept_[bytes].push_back(block);
  }
  // Waits until no stream uses freed memory, so it may go anywhere. Does
  // nothing while a graph is recorded, when waiting is impossible.
  std::size_t release_kept() override {
    if (kept_.empty() || device_.recording_ != nullptr) return 0;
    device_.synchronize();
    const std::lock_guard<std::mutex> lock(device_.uses_);
    std::size_t bytes = 0;
    for (auto& [size, blocks] : kept_) {
      const auto free_ones = std::stable_partition(
          blocks.begin(), blocks.end(),
          [](const Block& block) { return !block.use->graphs_.empty(); });
      for (auto block = free_ones; block != blocks.end(); ++block) {
        device_.forget_earlier(*block->use);
        device_.runtime().free(block->data);
        uses_.erase(block->data);
        bytes += size;
      }
      blocks.erase(free_ones, blocks.end());
    }
    return bytes;
  }

 private:
  static bool is_alone(const BlockUse& use, int stream) {
    return std::all_of(
        use.earlier_.begin(), use.earlier_.end(),
        [stream](const auto& earlier) { return earlier.stream == stream; });
  }

  CudaDevice& device_;
  std::map<std::size_t, std::vector<Block>> kept_;
  std::map<void*, std::unique_ptr<BlockUse>> uses_;
};

std::unique_ptr<DeviceMemory> CudaDevice::make_memory() {
  return std::make_unique<CudaMemory>(*this);
}

}  // namespace shardbook::internal
