// Device memory is reached through a CUDA context that is current on the calling thread, and a new thread has none.
#pragma once

namespace kvferry {

// Make the context that this process's other threads use current on this one, before a transport looks at devices.
// Does nothing where the process has loaded no CUDA driver, or uses no device. The driver is looked up, never linked.
void adopt_cuda_context();

// The same for one device. Raises KVFERRY_UNAVAILABLE if the process does not use it.
void adopt_cuda_context(int device);

}  // namespace kvferry
