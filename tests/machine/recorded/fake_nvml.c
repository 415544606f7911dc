/* The part of NVIDIA's libnvidia-ml.so that exo-mesh uses, for two GPUs; the second says only how busy it is. */
#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3 };

int nvmlInitWithFlags(unsigned int flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == NOT_SUPPORTED ? "Not Supported" : "Success"; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = (void *)(long)(index + 1); return SUCCESS; }
int nvmlDeviceGetName(void *device, char *name, unsigned int length) {
    snprintf(name, length, "Shim GPU %ld", (long)device - 1);
    return SUCCESS;
}

static int only_first(void *device) { return (long)device == 1 ? SUCCESS : NOT_SUPPORTED; }

int nvmlDeviceGetUtilizationRates(void *device, unsigned int *rates) { rates[0] = 75; rates[1] = 30; return SUCCESS; }
int nvmlDeviceGetPowerUsage(void *device, unsigned int *milliwatts) { *milliwatts = 250000; return only_first(device); }
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    *millijoules = 5000000;
    return only_first(device);
}
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *celsius) { *celsius = 66; return only_first(device); }
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned int *megahertz) { *megahertz = 1500; return only_first(device); }
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    memory[0] = 1ULL << 34; /* total, free, used */
    memory[1] = 1ULL << 33;
    memory[2] = 1ULL << 33;
    return only_first(device);
}
