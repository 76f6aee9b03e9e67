// Lets one definition serve the kernels (nvcc) and the host tests (any C++17 compiler).
#pragma once

#ifdef __CUDACC__
#define FRX_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FRX_HOST_DEVICE inline
#endif
