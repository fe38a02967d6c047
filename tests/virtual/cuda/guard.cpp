// A CPU build of torch has no guard of CUDA devices, and stops where an operation would enter one. This one does nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
const c10::impl::DeviceGuardImplRegistrar guard(
    c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
}
