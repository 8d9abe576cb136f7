package shm

func startGoroutine(do func()) { go do() }
