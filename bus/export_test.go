package bus

// ResumesMost is how often a process that can be replaced turns JetStream on again.
const ResumesMost = resumesMost

// SetConnectionsMost bounds the connections of one credential.
func (b *Bus) SetConnectionsMost(n int) { b.srv.auth.most = n }

// SetStoreResumes has the guard of the store count as if it had turned JetStream on so often.
func (b *Bus) SetStoreResumes(n int) {
	b.srv.guard.mu.Lock()
	defer b.srv.guard.mu.Unlock()
	b.srv.guard.resumes = n
}
