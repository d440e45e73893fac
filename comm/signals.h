#pragma once

// SIGINT, SIGTERM and SIGHUP, received by a thread that waits for them.
//
//   int main() {
//     watch_signals();              // before any other thread starts
//     prepare();                    // a signal ends the program at once
//     begin_checking_signals();
//     while (received_signal() == 0 && train_a_step()) {
//     }
//   }
//
// No thread that computes runs a signal handler. The kernel writes a handler's
// frame below the stack pointer, and generated code may have moved that
// pointer: oneDNN's sgemm points it at a buffer of malloc's while it computes
// (src/cpu/x64/gemm/f32/jit_avx512_common_gemm_f32.cpp, at the label
// buffer_in_ws), so the frame overwrites the memory before the buffer.

namespace shardbook {

/// Blocks the signals in this thread, and thereby in all threads that it
/// starts, and starts the thread that receives them. SIGHUP stays ignored under
/// nohup. Further calls do nothing.
void watch_signals();

/// Promises to poll received_signal(). Until then the first signal ends the
/// process at once, with status 128 + its number; from then on the second one
/// does.
void begin_checking_signals();

/// The first signal that came; 0 while none did. Always 0 in a program that
/// does not watch them.
int received_signal();

}  // namespace shardbook
