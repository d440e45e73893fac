#pragma once

// Runs CUDA kernels on the host, and finds what a GPU would leave unsaid.
//
// The sources of core/kernels/cuda are compiled by the host's compiler against
// the headers in include/. A kernel is then an ordinary function; launch() puts
// it on a stream, and when the stream is waited for, the emulator calls the
// function once per thread. ../README.md tells what it checks, and how.
//
//   emulator::set_seed(3);                      // another order of everything
//   emulator::launch("double", dim3(4), dim3(256), stream, kernel, n, x);
//   cudaStreamSynchronize(stream);              // here the kernel runs
//
// Whatever a kernel does wrong becomes the error code of the call that waits
// for it; cudaGetErrorString then says "double: block 2, thread 17: ...".
//
// One thread of the host runs at a time here, whoever calls. Work on streams
// runs only when some thread waits for it.

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <utility>

namespace emulator {

/// The order of blocks, of threads between barriers, and of streams that do not
/// wait for each other. 0: as they are numbered, and other streams as late as
/// can be; 1: backwards; others: random, and other streams now and then early.
void set_seed(std::uint64_t seed);
std::uint64_t seed();

/// The `nth` call from now of a function of the runtime ("cudaMalloc") returns
/// `error` and does nothing else.
void fail_call(const std::string& function, int nth = 1,
               cudaError_t error = cudaErrorUnknown);

/// How often the program has called a function of the runtime.
int num_calls(const std::string& function);

/// Devices that exist from now on; SHARDBOOK_EMULATED_GPUS says how many there
/// are at first (4 where it does not).
void set_device_count(int count);
/// Bytes that a device holds; the next cudaMalloc beyond them fails.
void set_device_memory(std::size_t bytes);

/// Runs what is left on all streams, and forgets planted failures and errors.
void reset();

/// Work of another kind on a stream, such as a collective. `poll` is called
/// once the work before it is done, and again until it returns true; it says
/// false while it waits for other streams. It runs on any host thread. What it
/// throws becomes the error of the call that waits for it.
void enqueue(cudaStream_t stream, std::string name, std::function<bool()> poll);
/// Lets threads that wait ask `poll` again, after a change from outside.
void wake();
/// The same within `poll`.
void wake_from_poll();

/// One grid: what runs, and how many of it.
struct Grid {
  std::string name;
  dim3 grid, block;
  std::function<void()> thread;  ///< the kernel with its arguments
};
void launch_grid(cudaStream_t stream, Grid grid);

template <typename... Params>
void launch(const char* name, dim3 grid, dim3 block, cudaStream_t stream,
            void (*kernel)(Params...), std::type_identity_t<Params>... params) {
  launch_grid(stream, {name, grid, block,
                       [kernel, arguments = std::tuple<Params...>(params...)] {
                         std::apply(kernel, arguments);
                       }});
}

}  // namespace emulator
